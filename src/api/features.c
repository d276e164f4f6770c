/* The names of the optional features in this build. They are in a section of their own, so that tests can
 * read them from the library's file (tests/common/features.py). */
__attribute__((section("calm_features"), used)) static const char features[] = CALM_FEATURES;
