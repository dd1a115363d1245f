"""The controller's ports and what travels over them: frames of agents, HTTP for people, TLS, rate limits."""
