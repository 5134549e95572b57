#pragma once

#include <nanobind/nanobind.h>

// Adds Screen and QuantisedHead to the module: see bind_heads.cpp. DenseWeight and Executor are there before.
void bind_heads(nanobind::module_& m);
