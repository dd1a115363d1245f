"""The daemon on the management node: takes reports in, judges, decides, acts, and writes all of it down."""
