"""Transport of a job's folders and packages to machines that do not see the submitting machine's files.

    here (`packing`)       each such folder becomes a tree named by a hash of its content; and a manifest lists them
    <run>/carried.json     the manifest, only in copies of the run's folder on other machines
    <workspace there>/carried/<tree>/      the files; or, beyond a datastore, <datastore>/paceline/carried/<tree>/
    there (`stage_in`)     the job, with its paths translated to that machine

`stage_out` and `stage_out_local` bring outputs back to folders of the submitting machine.

Targets transport the trees. Remote datastores are not copied: the manifest has their records; the other machine opens
them with credentials that it finds like this machine. Secrets are never sent.
"""
