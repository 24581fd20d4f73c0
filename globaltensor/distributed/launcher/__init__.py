"""The parts of the launcher, whose command is ``globaltensor.distributed.launch``.

`options` (the command line) makes a `job`, which `elastic_agent` starts, and starts again if
restarts are left. `node_rendezvous` connects the launchers of several hosts. `workers` owns the
ranks' processes, and `log_streams` their output. `mpirun` starts the processes if they need an MPI
world. `parent_death_signal`, `orphan_reaper` and `mpirun_shim` are small scripts that run as
separate processes.
"""
