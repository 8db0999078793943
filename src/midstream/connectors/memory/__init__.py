"""Rows that a program holds, generates, collects or prints."""
