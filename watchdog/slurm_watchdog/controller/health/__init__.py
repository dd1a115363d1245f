"""Whether all is well, for the whole and for each job, as every surface shows it: page, status, Slack, metrics."""
