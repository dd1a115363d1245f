"""What is known of jobs, ranks, nodes, GPUs and filesystems: facts, put into one view for the detectors."""
