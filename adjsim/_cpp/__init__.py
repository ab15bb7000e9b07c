"""C++ code generation for traced loops of steps: one function per loop, one allocation per call."""
