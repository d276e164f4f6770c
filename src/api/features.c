/*
 * The names of the optional features in this build. Tests read them from this
 * section of the library's file (tests/common/features.py).
 */
__attribute__((section("calm_features"), used)) static const char features[] = CALM_FEATURES;
