// The kernels of torch that the stand-in can do, by their mangled names.
#pragma once
#include <functional>
#include <string>

using Work = std::function<void()>;

// What a launch of the kernel does, with its arguments read now, because the caller's memory for them goes away.
// Empty for a kernel that is not known here.
Work work_of_kernel(const std::string& name, void** arguments);
