"""A user's job in the simulator: `midstream simulate JOB.py` and `midstream.testing.simulate`.

Reading order: `simulated_job`, `job_scenario`, `simulated_run`, `output_compare`, `verdict`, `campaign`; `causes` and
`code_hints` explain a difference.
"""
