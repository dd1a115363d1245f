"""How values travel between agent and controller: encoding, deltas, HTTP, TLS, rate limits."""
