"""The protocol between driver and slots: typed control messages, framing, and the handshake.

May import `core`. Sans-I/O: bytes in, messages out. The only pickle is the job graph inside `Deploy` and `CommitSinks`,
which a slot reads only from the coordinator that it has authenticated.
"""
