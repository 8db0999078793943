"""What a job's author tests it with: `simulate` puts a job through failures, in one process and without real time.

May import everything but `ui`; nothing but `ui` and tests imports it.
"""

from midstream.testing.simulate import simulate as simulate
