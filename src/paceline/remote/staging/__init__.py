"""What a run takes along to machines that do not see the submitting one's files: folders and packages that its job names.

    here (`packing`)       the files of each such place, as a tree with a name of its content; and a manifest
    <run>/carried.json     the manifest, in the copy of the run's folder that those machines have, never in the run's own
    <workspace there>/carried/<tree>/      the files; or, beyond a datastore, <datastore>/paceline/carried/<tree>/
    there (`arrived`)      the job with the places that its files have there

The way back is that of outputs that go to a folder of the submitting machine (`leaving`, `home`).

Who brings the trees is the targets' business. Datastores that are no folders travel by name: their records are in the
manifest, and are opened there, with credentials that have to be found in the same places. No secret travels.
"""
