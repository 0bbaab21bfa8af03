"""Many runs together: what a study trains, its processes, what it measures on the finished runs,
and its report."""
