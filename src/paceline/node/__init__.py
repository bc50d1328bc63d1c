"""The program that prepares each node before the workers start, and stores their outputs afterwards.

The supervisor starts this program as a separate command, so it can watch and end the program on any machine.
"""
