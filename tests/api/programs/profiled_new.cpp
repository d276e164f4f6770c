// Keeps 30 MB of a vector of strings, and frees as much of a map: for a heap profile to tell of.
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

static std::vector<std::string> &kept = *new std::vector<std::string>; // outlives all destructors

__attribute__((noinline)) static void keep_strings(int count) {
    for (int i = 0; i < count; i++) {
        kept.emplace_back(999, 'x');
    }
}

__attribute__((noinline)) static std::size_t drop_map(int count) {
    std::map<int, std::string> numbers;
    for (int i = 0; i < count; i++) {
        numbers[i] = std::string(999, 'y');
    }
    return numbers.size();
}

// Not known to be called but once: gcc would put them where Go's pprof names nothing.
static void (*volatile keep)(int) = keep_strings;
static std::size_t (*volatile drop)(int) = drop_map;

int main() {
    kept.reserve(30000);
    keep(30000);
    try {
        if (drop(30000) == 30000) {
            throw std::runtime_error("unwound by the C++ library, too");
        }
    } catch (const std::runtime_error &) {
        return 0;
    }
    return 1;
}
