"""C++ code generation for traced loops of steps, with one function per loop."""
