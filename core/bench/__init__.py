"""Measure speculation: a file of prompts, configurations that take turns, a report."""
