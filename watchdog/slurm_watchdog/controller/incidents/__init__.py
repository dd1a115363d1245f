"""Findings become incidents: opened, correlated, resolved."""
