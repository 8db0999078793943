"""What a task does with rows: the operator contract, and every operator of the API.

May import `core` and `state`. An operator instance belongs to one subtask and runs on its slot's
loop thread; it never blocks, and reaches files only through `OperatorContext.executor`.
"""
