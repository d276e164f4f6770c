// A shared library that hides what it has, and hands out containers.
#include "calmalloc.hpp"

#include <vector>

__attribute__((visibility("default"))) calm::memory_resource *resource_of_plugin();
calm::memory_resource *resource_of_plugin() {
    return calm::resource();
}

__attribute__((visibility("default"))) std::pmr::vector<int> numbers_of_plugin();
std::pmr::vector<int> numbers_of_plugin() {
    static calm::memory_resource own;
    return {{1, 2, 3}, &own};
}
