//! A picture in memory, written as PNG: plotters draws lines and areas by pixels, and text comes
//! from an 8 × 8 font in the binary, so that no fonts need to be on the machine.

use std::convert::Infallible;
use std::io::BufWriter;
use std::path::Path;

use anyhow::Context as _;
use font8x8::UnicodeFonts as _;
use plotters::prelude::DrawingBackend;
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle as _, BackendTextStyle, DrawingErrorKind,
};

/// Width and height of a letter.
const LETTER: i32 = 8;

/// The picture.
pub(super) struct Canvas<'a> {
    /// Three bytes a pixel, row by row.
    pixels: &'a mut [u8],
    width: u32,
    height: u32,
}

impl<'a> Canvas<'a> {
    /// Of three bytes a pixel.
    pub fn new(pixels: &'a mut [u8], width: u32, height: u32) -> Self {
        Self {
            pixels,
            width,
            height,
        }
    }
}

/// Writes pixels as a PNG file.
pub(super) fn write_png(file: &Path, pixels: &[u8], size: (u32, u32)) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", file.display());
    let out = BufWriter::new(std::fs::File::create(file).with_context(cannot)?);
    let mut encoder = png::Encoder::new(out, size.0, size.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().with_context(cannot)?;
    writer.write_image_data(pixels).with_context(cannot)?;
    writer.finish().with_context(cannot)
}

impl DrawingBackend for Canvas<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    fn ensure_prepared(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn present(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn draw_pixel(
        &mut self,
        (x, y): BackendCoord,
        color: BackendColor,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else {
            return Ok(());
        };
        if x >= self.width || y >= self.height {
            return Ok(());
        }
        let at = (y * self.width + x) as usize * 3;
        let (r, g, b) = color.rgb;
        if let Some(pixel) = self.pixels.get_mut(at..at + 3) {
            for (old, new) in pixel.iter_mut().zip([r, g, b]) {
                let mixed = f64::from(*old) * (1.0 - color.alpha) + f64::from(new) * color.alpha;
                *old = mixed.round() as u8;
            }
        }
        Ok(())
    }

    fn estimate_text_size<T: BackendTextStyle>(
        &self,
        text: &str,
        _: &T,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        let letters = u32::try_from(text.chars().count()).unwrap_or(u32::MAX / 16);
        Ok((letters * LETTER as u32, LETTER as u32))
    }

    fn draw_text<T: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &T,
        at: BackendCoord,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        let color = style.color();
        let width = i32::try_from(text.chars().count()).unwrap_or(0) * LETTER;
        let left = match style.anchor().h_pos {
            HPos::Left => 0,
            HPos::Right => -width,
            HPos::Center => -width / 2,
        };
        let top = match style.anchor().v_pos {
            VPos::Top => 0,
            VPos::Center => -LETTER / 2,
            VPos::Bottom => -LETTER,
        };
        let turn = style.transform();
        for (n, letter) in (0..).zip(text.chars()) {
            let rows = font8x8::BASIC_FONTS.get(letter).unwrap_or([0; 8]);
            for (y, row) in (0..).zip(rows) {
                for x in (0..LETTER).filter(|x| row >> x & 1 == 1) {
                    let (dx, dy) = turn.transform(left + n * LETTER + x, top + y);
                    self.draw_pixel((at.0 + dx, at.1 + dy), color.color())?;
                }
            }
        }
        Ok(())
    }
}
