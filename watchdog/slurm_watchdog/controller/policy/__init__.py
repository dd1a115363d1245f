"""Whether an incident is acted on, and how: modes, rules, guards, owners' directives, placement. Pure."""
