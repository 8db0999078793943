"""What driver and slots say to each other: typed control messages, framing, and the handshake.

May import `core`. Sans-I/O: bytes in, messages out. No pickles but the job graph inside `Deploy`,
which a slot reads only from the coordinator it has authenticated.
"""
