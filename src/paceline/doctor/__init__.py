"""Find faults of a compute target before a run uses it.

doctor.py       the checks of `paceline compute doctor`, in order
examination.py  the state that checks share, and requests to nodes with a timeout
on_node.py, reduce_on_node.py   programs that are sent to nodes as text; they import nothing of Paceline
"""
