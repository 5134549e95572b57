#pragma once

#include <nanobind/nanobind.h>

// Adds Cache, Program, Executor and Background to the module.
void bind_programs(nanobind::module_& m);
