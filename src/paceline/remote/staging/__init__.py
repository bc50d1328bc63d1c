"""Files that a run needs on machines without the submitting machine's files: folders and packages that its job names.

    here (`packing`)       each such place as a tree, named by its content; and a manifest
    <run>/carried.json     the manifest, only in copies of the run's folder on other machines
    <workspace there>/carried/<tree>/      the files; or, beyond a datastore, <datastore>/paceline/carried/<tree>/
    there (`stage_in`)     the job with the places of its files there

`stage_out` and `stage_out_local` return outputs for folders of the submitting machine.

Targets transport the trees. Datastores that are not folders travel by name: the manifest has their records, and they are
opened there with credentials from the same places. Secrets never travel.
"""
