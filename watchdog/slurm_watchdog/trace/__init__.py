"""*Trace v1* (docs/traces.md): what agents and Slurm said, one JSON line a record, written by `controller --record`, by
generators, or manually. A recording also has the kinds `stack` and what a controller says of itself."""
