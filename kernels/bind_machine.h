#pragma once

#include <nanobind/nanobind.h>

// Adds Limits to the module: see bind_machine.cpp.
void bind_machine(nanobind::module_& m);
