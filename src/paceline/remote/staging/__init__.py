"""Send a job's folders and packages to machines that do not see the submitting machine's files.

    here (`packing`)       each folder becomes a tree, named by a hash of its content; a manifest lists all trees
    <run>/carried.json     the manifest, which only copies of the run's folder on other machines have
    <workspace there>/carried/<tree>/      the files of a tree, or <datastore>/paceline/carried/<tree>/ in a datastore
    there (`stage_in`)     the job, with its paths translated to that machine

`stage_out` and `stage_out_local` bring outputs back to folders of the submitting machine.

Targets transport the trees. Remote datastores are not copied: the manifest has their records, and the other machine
opens them with credentials of its own. Secrets are never sent.
"""
