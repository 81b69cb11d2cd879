//! Minimises unary plus pairwise costs over discrete choices, under memory limits over time.
