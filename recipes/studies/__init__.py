"""Many runs together: the plan of a study or the grid of a sweep, their processes, and the report of what came out."""
