"""Notifications to Slack, webhook and Alertmanager: pure formatting, an outbox in the journal, one sender."""
