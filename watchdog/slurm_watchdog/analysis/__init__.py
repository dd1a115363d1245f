"""What detectors and the diagnosis both compute from a view of the cluster. Pure."""
