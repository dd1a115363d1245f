"""Pages that are generated from the code: options, metrics, dashboards."""
