"""The doctor: find faults of a compute target before a run waits in vain.

doctor.py       the examination, check after check
examination.py  the state that checks share, and requests to nodes with a timeout
on_node.py, reduce_on_node.py   programs that are sent to nodes as text; they import nothing of Paceline
"""
