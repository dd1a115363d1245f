"""Runs the node test, deploy/node-test/node_test.py or a site's own, on nodes, and says who is slow and by what."""
