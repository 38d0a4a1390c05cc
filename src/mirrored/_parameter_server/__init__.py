"""Training on parameter servers: workers run closures, servers hold the variables.

Owns everything that is asynchronous; nothing in it takes part in a lockstep program.
"""
