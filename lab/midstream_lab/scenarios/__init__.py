"""Scenarios: one run as data, drawn by a seed (`scenario`, `random_scenarios`), or targeted at what has been wrong before."""
