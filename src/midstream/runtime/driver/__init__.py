"""The driver of a job in the process that started it, the handle on it, and what other processes find of it."""
