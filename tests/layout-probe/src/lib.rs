//! kernels/layout.h as a C compiler sees it.
