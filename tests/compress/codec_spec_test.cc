#include "compress/codec_spec.h"

#include <gtest/gtest.h>

#include "compress/codec_list.h"

namespace thinwire {
namespace {

TEST(CodecSpec, PrintsWhatItParses) {
  for (const char* text : {"fp32", "bf16", "int8", "int4", "int4:block=128", "int8:block=4096"}) {
    const auto spec = CodecSpec::Parse(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->ToString(), text);
  }
  EXPECT_EQ(CodecSpec::Parse("int4:block=256")->ToString(), "int4");
  EXPECT_EQ(CodecSpec::Parse("topk:density=0.01,warmup=0")->ToString(), "topk");
  EXPECT_EQ(CodecSpec::Parse("adaptive:bits=2,floor=0,block=256")->ToString(), "adaptive");
  for (const char* text : {"onebit",
                           "onebit:block=512",
                           "topk",
                           "topk:density=0.001,warmup=500",
                           "topk:warmup=5,masking=0",
                           "topk:density=1e-06",
                           "int8:rounding=stochastic",
                           "int4:block=512,rounding=stochastic,seed=18446744073709551615",
                           "int4:rounding=stochastic,hadamard=1,seed=3",
                           "onebit:down=onebit",
                           "int8:down=int4",
                           "int8:block=128,down=int4:block=512,hadamard=0",
                           "fp32:down=bf16",
                           "adaptive",
                           "adaptive:bits=0.5",
                           "adaptive:bits=5.9375,floor=2,seed=3",
                           "adaptive:bits=1,floor=1",
                           "adaptive:bits=1,down=adaptive",
                           "onebit:down=adaptive:bits=0.5625",
                           "ternary",
                           "ternary:threshold=0.1",
                           "ternary:threshold=1e-30,down=fp32",
                           "ternary:threshold=0.33333334,down=ternary"}) {
    const auto pair = CodecPair::Parse(text);
    ASSERT_TRUE(pair.ok()) << pair.status();
    EXPECT_EQ(*CodecPair::Parse(pair->ToString()), *pair) << text;
    if (std::string(text).find("hadamard=0") == std::string::npos) {
      EXPECT_EQ(pair->ToString(), text);
    }
  }
}

TEST(CodecPair, TheSecondHopHasItsDefault) {
  EXPECT_EQ(CodecPair::Parse("onebit")->down.ToString(), "int4");
  EXPECT_EQ(CodecPair::Parse("onebit:block=512")->down.ToString(), "int4:block=512");
  EXPECT_EQ(CodecPair::Parse("int4:hadamard=1")->down.ToString(), "int4:hadamard=1");
  EXPECT_EQ(CodecPair::Parse("int8:down=onebit")->down.ToString(), "onebit");
  EXPECT_EQ(CodecPair::Parse("ternary:threshold=2")->down.ToString(), "int4");
  EXPECT_EQ(CodecPair::Parse("adaptive:bits=1")->down.ToString(), "adaptive:bits=1");
  EXPECT_TRUE(CodecPair::Parse("bf16:down=int8")->uses_feedback());
  EXPECT_FALSE(CodecPair::Parse("bf16")->uses_feedback());
  EXPECT_TRUE(CodecPair::Parse("ternary:down=fp32")->uses_feedback());
}

TEST(CodecPair, EntriesBecomeDenseWhereThatIsFewerBytes) {
  const CodecPair entries = *CodecPair::Parse("topk:density=0.05");
  EXPECT_EQ(entries.ForWorld(5), entries);
  EXPECT_EQ(entries.ForWorld(6).ToString(), "int4");
  const CodecPair dense = *CodecPair::Parse("onebit:block=512");
  EXPECT_EQ(dense.ForWorld(1000), dense);
}

TEST(CodecPair, SaysThatDevicesRunIt) {
  for (const char* codec : {"topk", "adaptive", "onebit:down=int8", "int8:down=adaptive"}) {
    EXPECT_TRUE(CodecPair::Parse(codec)->has_kernels()) << codec;
  }
  for (const char* codec : {"int8:rounding=stochastic", "int4:down=int8:rounding=stochastic",
                            "ternary", "int4:down=ternary"}) {
    EXPECT_FALSE(CodecPair::Parse(codec)->has_kernels()) << codec;
  }
}

TEST(CodecSpec, LosslessKeepsTheElements) {
  EXPECT_EQ(LosslessSpec(DType::kF32).ToString(), "fp32");
  EXPECT_EQ(LosslessSpec(DType::kBF16).ToString(), "bf16");
  EXPECT_EQ(LosslessSpec(DType::kF16).ToString(), "fp32");
}

TEST(CodecSpec, ErrorsNameTheNearest) {
  const std::pair<const char*, const char*> cases[] = {
      {"int5", "'int"},
      {"in8", "'int8'"},
      {"", "unknown codec ''"},
      {"bf61", "'bf16'"},
      {"int4:blok=256", "'block'"},
      {"int4:block=250", "block=256"},
      {"int4:block=0", "block=128"},
      {"int4:block=99999", "block=4096"},
      {"int4:block=x", "block=128"},
      {"int4:", "no parameter ''"},
      {"fp32:block=256", "no parameters"},
      {"int4:block=128,x=1", "'x'"},
      {"onebti", "'onebit'"},
      {"topk:densty=1", "'density'"},
      {"topk:density=0", "density=1e-06"},
      {"topk:density=2", "density=1"},
      {"topk:density=nan", "0.000001 to 1"},
      {"topk:warmup=-1", "warmup=0"},
      {"int8:rounding=stochastik", "=stochastic"},
      {"int8:hadamard=1", "no parameter"},
      {"int4:hadamard=2", "0 or 1"},
      {"int4:hadamard=1,block=512", "block=512"},
      {"onebit:seed=1", "'block'"},
      {"adaptive:bits=0.4", "bits=0.5"},
      {"adaptive:bits=7", "bits=6"},
      {"adaptive:bits=2.03", "bits=2"},
      {"adaptive:bits=inf", "steps of 1/16"},
      {"adaptive:bits=x", "bits=2"},
      {"adaptive:floor=3", "floor=2"},
      {"adaptive:floor=-1", "floor=0"},
      {"adaptive:bits=1,floor=2", "bits=2"},
      {"adaptive:block=512", "block=512"},
      {"adaptive:hadamard=1", "no parameter"},
      {"ternary:threshold=0", "threshold=1e-30"},
      {"ternary:threshold=-0.5", "threshold=1e-30"},
      {"ternary:threshold=inf", "threshold=1e+30"},
      {"ternary:threshold=nan", "threshold=0.5"},
      {"ternary:threshold=x", "1e-30 to 1e30"},
      {"ternary:block=256", "'threshold'"},
      {"int8:seed=x", "2^64"},
      {"int8:seed=x", "seed=0"},
      {"int8:seed=-1", "seed=0"},
      {"int8:seed=18446744073709551616", "seed=18446744073709551615"},
      {"int8:seed=12x", "seed=12"},
      {"topk:down=int4", "no second hop"},
      {"int4:down=topk", "no second hop"},
      {"int4:down=int5", "'int"}};
  for (const auto& [text, words] : cases) {
    const auto spec = CodecPair::Parse(text);
    ASSERT_TRUE(absl::IsInvalidArgument(spec.status())) << text;
    EXPECT_NE(spec.status().message().find(words), absl::string_view::npos) << spec.status();
  }
}

// FORMAT.md, "Parameters".
TEST(CodecSpec, NumbersMayBeWrittenInSeveralWays) {
  const std::pair<const char*, const char*> same[] = {
      {"adaptive:bits=.5", "adaptive:bits=0.5"},
      {"adaptive:bits=2e0", "adaptive"},
      {"adaptive:bits=+2.0", "adaptive"},
      {"adaptive:bits= 3 ", "adaptive:bits=3"},
      {"topk:density=1e-2", "topk"},
      {"adaptive:bits=0x1p1", "adaptive"},
      {"ternary:threshold=5e-1", "ternary"},
      {"ternary:threshold=0.1000000001", "ternary:threshold=0.1"},
      {"int8:block=+512", "int8:block=512"},
      {"int8:block=128,block=512", "int8:block=512"},
      {"int8:block=512,block=256", "int8"}};
  for (const auto& [text, plain] : same) {
    const auto spec = CodecSpec::Parse(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->ToString(), plain) << text;
  }
  for (const char* text : {"adaptive:bits=inf", "adaptive:bits=nan", "int8:block=0x100",
                           "int8:block=2e2", "int8:block=256.0"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CodecSpec::Parse(text).status())) << text;
  }
}

TEST(CodecSpec, SizesAreThoseOfTheFormat) {
  const auto bytes = [](const char* text, size_t n) {
    return EncodedBytes(*CodecSpec::Parse(text), n);
  };
  EXPECT_EQ(bytes("int4", 0), 0u);
  EXPECT_EQ(bytes("int4", 1), 16u + 16u);
  EXPECT_EQ(bytes("int4", 256), 16u + 128u);
  EXPECT_EQ(bytes("int4", 257), 16u + 144u);
  EXPECT_EQ(bytes("int8", 2048), 16u + 2048u);
  EXPECT_EQ(bytes("int8", 2049), 32u + 2064u);
  EXPECT_EQ(bytes("int8:block=128", 2048), 32u + 2048u);
  EXPECT_EQ(bytes("bf16", 9), 32u);
  EXPECT_EQ(bytes("fp32", 4), 16u);
  EXPECT_EQ(bytes("onebit", 1), 16u + 16u);
  EXPECT_EQ(bytes("onebit", 2049), 32u + 272u);
  EXPECT_EQ(bytes("adaptive", 0), 0u);
  EXPECT_EQ(bytes("adaptive", 1), 16u + 64u);
  EXPECT_EQ(bytes("adaptive", 256), 16u + 64u);
  EXPECT_EQ(bytes("adaptive", 257), 16u + 128u);
  EXPECT_EQ(bytes("adaptive:bits=0.5", 3 * 256), 16u + 2 * 32u);
  EXPECT_EQ(bytes("adaptive:bits=2.0625", 16 * 256), 32u + 33 * 32u);
  EXPECT_EQ(bytes("ternary", 0), 0u);
  EXPECT_EQ(bytes("ternary", 64), 16u);
  EXPECT_EQ(bytes("ternary", 65), 32u);
  EXPECT_EQ(bytes("topk", 1), 16u + 16u);
  EXPECT_EQ(bytes("topk", 100001), 16u + 4016u);
  EXPECT_EQ(bytes("topk:density=0.001", 5 * 65536), 32u + 1312u);
}

}  // namespace
}  // namespace thinwire
