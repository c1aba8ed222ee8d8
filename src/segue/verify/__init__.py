"""`segue verify`: proof, on this machine and with this model, that the schedule never changes an answer.

cases.py       the requests that are answered
modes.py       what may differ between two runs: schedules and ways to send the requests; pairs of them
workbench.py   one loaded model, engines over it, and a runtime that notes what happened
delivery.py    the requests, one by one, all together or as live sessions → answers
matrix.py      the plain run, then every pair of modes, compared bit for bit
"""
