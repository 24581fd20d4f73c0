"""The launcher: ranks as processes, and what watches over them. The command is
``globaltensor.distributed.launch``.

`options` (the command line) make a `job`; an `agent` of torch's elastic starts it, again where it
may; `nodes` are the launchers of several hosts; `supervise` has the ranks, `streams` what they
write; `mpirun` starts them where MPI must; `tether`, `keeper` and `shim` are small scripts beside
them.
"""
