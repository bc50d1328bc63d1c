"""The doctor: what is wrong with a compute target, found before a run waits for it in vain.

doctor.py       the examination, check after check
examination.py  what the checks share
asking.py       nodes are asked, and never waited for without a limit
on_node.py, reduce_on_node.py   what runs there: text that is sent, it imports nothing of Paceline
"""
