"""What a job's author tests it with."""
