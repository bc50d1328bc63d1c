"""The program that prepares each node before the workers start, and stores their outputs afterwards.

The supervisor starts it as a separate command, so it can be watched and ended, on any machine.
"""
