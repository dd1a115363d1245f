"""*Trace v1*: what agents and Slurm said, one JSON line a record, written by `controller --record`, by
generators, or manually.

    {"t":0,"kind":"job","job_id":"7","state":"RUNNING","nodes":["n0","n1"],"restarts":0,"name":"m4","user":"u","batch_host":"n0"}
    {"t":5,"kind":"report","node":"n0"}
    {"t":5,"kind":"proc","node":"n0","job_id":"7","rank":0,"pid":280058,"start":123.0,"state":"D","state_age_s":65,
     "wchan":"rpc_wait_bit_killable","syscall":"write","path":"/gpfs/main_log.txt","mount":"/gpfs","cpu_s":1234.5}
    {"t":5,"kind":"gpu","node":"n0","job_id":"7","gpu":0,"uuid":"GPU-eb00","util":0,"sm_clock_mhz":1155,"power_w":68,"temp_c":28,
     "mem_used_mib":22377,"throttle":[],"pids":[280058]}
    {"t":5,"kind":"log","node":"n0","job_id":"7","stream":"stdout","line":"iteration 12/100 | loss: 1.5"}
    {"t":5,"kind":"kmsg","node":"n0","line":"NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, GPU has fallen off the bus."}
    {"t":5,"kind":"mount","node":"n0","mount":"/gpfs","responding":false,"probe_s":null}
    {"t":5,"kind":"checkpoint","node":"n0","job_id":"7","step":45000,"complete":true}
    {"t":5,"kind":"fault","name":"frozen filesystem","job_id":"7","node":"n0"}

`t` is in seconds, on any clock that does not jump. A field that is missing is unknown; fields that no one
knows are ignored. A recording also has `more` (whatever else our own values hold), and the kinds `node`
(Slurm's word for a node) and `stack`.
"""
