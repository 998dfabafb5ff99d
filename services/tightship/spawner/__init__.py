"""The spawner: makes, reaps and signals contained processes. Standard library only, one thread, no event framework.

It must stay small: each launch copies its page tables.
"""
