// A program and its plugin: resources of both are equal, so what one allocated the other takes over.
#include "calmalloc.hpp"

#include <cstdio>
#include <utility>
#include <vector>

calm::memory_resource *resource_of_plugin();
std::pmr::vector<int> numbers_of_plugin();

int main() {
    if (!resource_of_plugin()->is_equal(*calm::resource()) || *calm::resource() != *resource_of_plugin()) {
        std::fputs("the resources differ\n", stderr);
        return 1;
    }
    std::pmr::vector<int> theirs = numbers_of_plugin();
    const int *data = theirs.data();
    std::pmr::vector<int> ours(std::move(theirs), calm::resource());
    if (ours.data() != data || ours != std::pmr::vector<int>{1, 2, 3}) {
        std::fputs("the numbers were copied\n", stderr);
        return 1;
    }
    ours.resize(100000);
    return 0;
}
