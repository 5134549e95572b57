#pragma once

#include <nanobind/nanobind.h>

// Adds Limits to the module: see bind_limits.cpp.
void bind_limits(nanobind::module_& m);
