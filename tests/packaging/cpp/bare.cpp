// calmalloc.hpp where exceptions and run-time types are off: what would be thrown ends the program.
#include "calmalloc.hpp"

#include <cstring>
#include <vector>

int main(int argc, char **argv) {
    std::vector<int, calm::allocator<int>> numbers(1000, 7);
    std::pmr::vector<int> others(1000, 7, calm::resource());
    if (numbers.back() != 7 || others.back() != 7 || calm_malloc_usable_size(numbers.data()) < 4000 ||
        calm_malloc_usable_size(others.data()) < 4000) {
        return 1;
    }
    calm::memory_resource another;
    if (!calm::resource()->is_equal(*calm::resource()) || calm::resource()->is_equal(another)) {
        return 1; // Without run-time types only the same one is surely of the same kind.
    }
    volatile std::size_t absurd = SIZE_MAX / 2 + (argc == 2 && std::strcmp(argv[1], "length") == 0 ? 1 : 0);
    if (argc == 2) {
        calm::allocator<char> chars;
        chars.deallocate(chars.allocate(absurd), absurd);
    }
    return 0;
}
