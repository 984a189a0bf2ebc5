"""Independent jobs on several processes: of this machine, one for each core or GPU, or of a Ray cluster.

Each job has a process and a log of its own, so that no failure reaches another job. A job leaves its result in a file
or directory, by which the next run of the same command recognises that it is finished.
"""
